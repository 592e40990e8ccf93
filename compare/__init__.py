"""The comparison: blocks and cases, numbers, runs and reports. Imports a framework only inside a worker process."""

from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
