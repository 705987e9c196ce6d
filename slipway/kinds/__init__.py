"""Task kinds: one record per kind of task, and the registry that finds it by the task's name.

Holds facts and the names of modules. The code of a kind lives in the room of its layer.
"""
