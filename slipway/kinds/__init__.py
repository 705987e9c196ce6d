"""Task kinds: one record per kind of task, its registry, and the digests of the code that it names.

Holds facts and the names of modules. The code of a kind lives in the room of its layer.
"""
