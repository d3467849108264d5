"""The reference engine: continuous batching on transformers models over a kvtide pool.

Import this package before torch computes anything: it tells the libraries under torch to repeat
their results (see `kvtide.serve.repeatable`).
"""

from kvtide.serve.repeatable import ask_for_repeatable_results

ask_for_repeatable_results()
