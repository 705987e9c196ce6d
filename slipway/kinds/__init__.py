"""Task kinds: a record for each kind of task, their registry, and digests of the code they name.

This package has facts and names of modules only. The code of a kind is in the packages of the
layers: data, training, reports, serving and so on.
"""
