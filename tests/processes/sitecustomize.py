"""Python imports this at its start where this folder is on PYTHONPATH: `ccfa run` fails where CCFA_FAIL says."""

import os
import sys

if os.environ.get("CCFA_FAIL") and "run" in sys.orig_argv:
    from failing import install

    install(os.environ["CCFA_FAIL"])
