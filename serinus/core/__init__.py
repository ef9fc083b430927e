"""core: the ground floor. Ids, errors, clock, chance, settings, metrics, log, and the plain data all rooms share.

Knows nothing of devices, sockets or people. Imports nothing above itself.
"""
