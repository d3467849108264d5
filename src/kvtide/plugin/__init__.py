"""Where engines meet kvtide. The files here are what every engine needs; a folder knows one engine.

description    what a pool of an engine's consists of: parts, and the rules of their rows
refusals       why a pool is left to the engine, or a move failed: errors, and a word for each
keeper         saves and restores requests; books: what it counts
ranks          how the ranks of a server come to one answer
host_memory    what the arenas of a host's ranks may take together
metrics        the counters as Prometheus metrics; status: what a keeper covers, in words
reader         the attributes of an engine's objects that kvtide reads, each of them in a table
package        an engine's package: where it defines the classes that kvtide knows
source         what the text of that package says of its classes
versions       whether an untested version still has what kvtide reads
census         all classes of pools in it, and what becomes of each
"""
