"""`serinus up --ray`: engines and routers as actors on the nodes of a Ray cluster, which this command looks after.

Ray decides where things run and tells when a node is gone; engines and routers are the processes that `serinus serve`
and `serinus router` are; `serinus.scale` decides how many there should be. `run.py` is the command; it needs the extra
`ray`, which `placement.py` and `seen.py` do not.
"""
