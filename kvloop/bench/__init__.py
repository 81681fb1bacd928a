"""Measures what reuse gains, on any running kvloop stack.

`kvloop bench ttft` is the command. From Python, `run_rounds` holds conversations
by token ids with reuse off and on, in random order within one run; `cells`
reduces its samples to medians, percentiles and ratios.
"""
