"""`kvstore demo`: the store's whole job, once, on a real model and on any machine.

The parent process (`cli`) starts a daemon and one worker process per stage; only the workers load a model.
"""
