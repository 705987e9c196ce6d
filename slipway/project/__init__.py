"""New projects: inspects data, proposes params with reasons, and writes a project folder.

It runs no stage, and no stage imports it.
"""
