"""The `kvtide` command: one file per verb.

Nothing in the library imports this package. Its modules import torch and transformers inside the
commands, so that help and errors of input are there at once.
"""
