"""Task kinds: a record for each kind of task, their registry, and digests of the code they name.

Records hold facts and names of modules. The code of a kind is in the packages of the layers.
"""
