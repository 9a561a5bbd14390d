"""The paper's tables as it prints them: the text of each row under its label.

A label names the method, with an asterisk for the authors' own run, and what is plugged in.
"""

# CIFAR-100 by number of tasks: 50, 25, 10, 5.
MAIN: dict[str, str] = {
    "iCaRL": "44.20 50.60 53.78 58.08",
    "BiC": "47.09 48.96 53.21 56.86",
    "Mnemonics": "- 60.96 62.28 63.34",
    "GDumb*": "59.76 59.97 60.24 60.70",
    "TPCIL": "- - 63.58 65.34",
    "GeoDL*": "52.28 60.21 63.61 65.34",
    "UCIR": "49.30 57.57 61.22 64.01",
    "PODNet": "57.98 60.72 63.19 64.83",
    "PODNet*": "57.84 60.50 62.77 64.62",
    "PODNet* + CCFA": "60.69 62.91 65.50 67.24",
    "AANet": "- 62.31 64.31 66.31",
    "AANet*": "60.91 62.34 64.49 66.34",
    "AANet* + CCFA": "62.20 63.74 66.16 67.37",
    "AFC": "62.18 64.06 64.29 65.82",
    "AFC*": "61.74 63.78 64.63 66.02",
    "AFC* + CCFA": "63.11 64.59 65.61 66.47",
}

# The same with standard deviations over three class orders, in the supplement.
SUPPLEMENT: dict[str, str] = {
    "UCIR*": "50.44±0.32 56.61±0.32 60.47±0.32 63.76±0.32",
    "UCIR* + CCFA": "52.64±1.17 57.42±0.70 61.58±0.60 64.13±0.32",
    "PODNet*": "57.84±0.37 60.50±0.62 62.77±0.78 64.62±0.65",
    "PODNet* + CCFA": "60.69±0.56 62.91±0.91 65.50±0.70 67.24±0.70",
    "AANet*": "60.91±1.00 62.34±1.17 64.49±0.81 66.34±0.76",
    "AANet* + CCFA": "62.20±1.31 63.74±0.92 66.16±1.03 67.37±1.12",
    "AFC*": "61.74±0.68 63.78±0.42 64.63±0.51 66.02±0.47",
    "AFC* + CCFA": "63.11±0.18 64.59±0.41 65.61±0.57 66.47±0.62",
}

# By number of tasks, then by exemplars per class: 1, 5, 20.
IMAGENET100: dict[int, dict[str, str]] = {
    5: {
        "PODNet": "- - 75.54",
        "PODNet*": "50.18 67.03 74.47",
        "PODNet* + CCFA": "64.28 72.42 75.78",
        "AANet": "- - 76.96",
        "AANet*": "71.25 75.22 78.05",
        "AANet* + CCFA": "74.48 76.75 78.14",
        "AFC": "- - 76.87",
        "AFC*": "56.53 72.75 76.91",
        "AFC* + CCFA": "64.45 74.35 76.75",
    },
    10: {
        "PODNet": "- - 74.33",
        "PODNet*": "37.64 63.21 72.37",
        "PODNet* + CCFA": "49.80 65.62 73.00",
        "AANet": "- - 74.33",
        "AANet*": "60.74 71.21 75.90",
        "AANet* + CCFA": "66.62 73.51 76.71",
        "AFC": "- - 75.75",
        "AFC*": "51.37 70.69 75.10",
        "AFC* + CCFA": "61.85 71.35 75.39",
    },
}

IMAGENET1000: dict[int, dict[str, str]] = {
    5: {
        "PODNet": "- - 66.95",
        "PODNet*": "51.20 66.08 69.70",
        "PODNet* + CCFA": "59.78 69.03 69.97",
        "AFC": "- - 67.02",
        "AFC*": "57.37 66.47 67.93",
        "AFC* + CCFA": "65.11 68.78 69.55",
    },
    10: {
        "PODNet": "- - 64.13",
        "PODNet*": "36.66 59.34 67.11",
        "PODNet* + CCFA": "48.41 63.74 67.82",
        "AFC": "- - 67.02",
        "AFC*": "52.36 63.62 65.96",
        "AFC* + CCFA": "63.42 67.07 67.88",
    },
}

# By number of tasks.
MIXING: dict[str, str] = {
    "PODNet + Mixup": "55.96 59.22 63.97 66.26",
    "PODNet + Mixup + CCFA": "58.47 64.05 67.77 69.19",
    "PODNet + CutMix": "58.92 62.69 66.18 68.30",
    "PODNet + CutMix + CCFA": "61.41 64.88 67.81 69.28",
}

# By exemplars per class: 5, 10, 20, 50.
MEMORY: dict[str, str] = {
    "iCaRL": "16.44 28.57 44.20 48.29",
    "BiC": "20.84 21.97 47.09 55.01",
    "UCIR": "22.17 42.70 49.30 57.02",
    "PODNet": "35.59 48.54 57.98 63.69",
    "PODNet + CCFA": "39.70 52.25 60.69 65.99",
}

# By classes of the first task: 20, 30, 40, 50.
INITIAL: dict[str, str] = {
    "iCaRL": "41.28 43.38 44.35 44.20",
    "BiC": "40.95 42.27 45.18 47.09",
    "UCIR": "41.69 47.85 47.51 49.30",
    "PODNet": "47.68 52.88 55.42 57.98",
    "PODNet + CCFA": "50.32 55.51 57.59 60.69",
}
