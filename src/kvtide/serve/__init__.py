"""The reference engine: continuous batching on transformers models over a kvtide pool.

Import it before anything is computed with torch: it has the libraries underneath repeat their
results (`kvtide.serve.repeatable`).
"""

from kvtide.serve.repeatable import ask_for_repeatable_results

ask_for_repeatable_results()
