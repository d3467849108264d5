"""Finds what works here: on a device (`kvtide doctor`) or in SGLang (`kvtide doctor --sglang`).

Each check is tried by itself. An error is a finding of its check; the other checks go on. A report
writes its findings to a page; the command decides how the page looks.
"""
