"""The former name of `xlafuse.pytest_plugin`, which the entry point of an older installation still has."""

import sys

import xlafuse.pytest_plugin

sys.modules[__name__] = xlafuse.pytest_plugin
