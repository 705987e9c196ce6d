"""Several models behind one address: a service per model, and the proxy in front of them.

It knows nothing of models: each service is the unchanged one, in processes of its own.
"""
