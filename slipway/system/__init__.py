"""Operating system services: files, errors, typed records, cores, disk faults, digests of code.

Nothing here knows about models, data or params.yaml.
"""
