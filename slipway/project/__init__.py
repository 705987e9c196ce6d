"""New projects: looks at data, proposes params with reasons, and writes a project folder.

No stage runs here, and no stage imports from here.
"""
