"""The comparison: blocks and cases, numbers, runs and reports. Imports a framework only inside a worker process."""

import os

__path__ = [os.path.realpath(folder) for folder in __path__]  # in a checkout, a link in xlafuse/ names this folder
