"""Plugins for engines. The files here serve every engine; each folder serves a single engine.

description    describes an engine's pool: its parts, and the rules of their rows
refusals       errors for a pool that is left to the engine, and for failed moves
keeper         saves and restores requests; counters: what it counts
ranks          makes the ranks of a server agree
host_memory    divides a host's memory among the arenas of its ranks; below: what is below these
environment    what an operator sets, for every engine alike
metrics        the counters as Prometheus metrics; status: describes a keeper in a line
reader         reads attributes of an engine's objects, which are listed in tables
package        an engine's package: where it defines the classes that kvtide knows
source         what the text of that package says of its classes
versions       the installed version; engine_reads: whether an untested one has what kvtide reads
weights        which weights a model has: a digest of its files
census         all classes of pools in it, and what becomes of each
"""
