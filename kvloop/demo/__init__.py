"""The demo: one scripted conversation, held twice, with reuse off and on."""

from kvloop.demo.comparison import DemoResult, TurnComparison, run_demo
from kvloop.demo.script import DemoScript

__all__ = ["DemoResult", "DemoScript", "TurnComparison", "run_demo"]
