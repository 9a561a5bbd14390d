"""Use a model that `ccfa export` has written, with onnxruntime, Pillow and NumPy alone.

ccfa export birds --format onnx
python examples/use_exported_model.py birds.onnx photo.jpg another.jpg
"""

import json
import sys
from math import ceil

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

if len(sys.argv) < 3:
    sys.exit(__doc__)
session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
facts = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
size, crop, resampling = facts["size"], facts["crop"], Image.Resampling[facts["interpolation"].upper()]
for path in sys.argv[2:]:
    file = Image.open(path)
    file.draft("RGB", (ceil(2 * size / crop),) * 2)  # large JPEGs are decoded at a fraction of their size
    photo = ImageOps.exif_transpose(file).convert("RGB")
    side = min(photo.size) * crop
    left, top = (photo.width - side) / 2, (photo.height - side) / 2
    square = photo.resize((size, size), resampling, box=(left, top, left + side, top + side))
    pixels = np.asarray(square.convert("RGB" if facts["channels"] == 3 else "L")).reshape(1, size, size, -1)
    _, probabilities, familiarity = session.run(None, {"images": pixels.transpose(0, 3, 1, 2)})
    best = int(probabilities[0].argmax())
    print(f"{path}: {facts['class_names'][best]} {probabilities[0, best]:.4f}")
    if facts["unfamiliar_below"] is not None and familiarity[0] < facts["unfamiliar_below"]:
        print(f"{path} is unlike the learned images")
