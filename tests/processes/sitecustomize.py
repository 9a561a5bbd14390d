"""Python imports this at its start where this folder is on PYTHONPATH: it installs what CCFA_FAIL says."""

import os

if os.environ.get("CCFA_FAIL"):
    from failing import install

    install(os.environ["CCFA_FAIL"])
