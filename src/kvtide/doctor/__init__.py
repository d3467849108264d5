"""What works here: on a device (`kvtide doctor`), in this SGLang (`kvtide doctor --sglang`).

Each thing is tried by itself, and an error is a finding: it says nothing about the other things. A
report writes its findings to a page; how a page looks is the command's affair.
"""
