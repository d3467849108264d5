"""What `kvtide doctor` looks at and tries; the command itself only asks and prints.

Everything is tried by itself, and its error is a finding: one that is there says nothing
about the others. These modules import torch, so the command imports them when it is called.
"""
