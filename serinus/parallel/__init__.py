"""parallel: several ranks of one engine: what each has of the model, and tensors between ranks.

`Mesh` numbers the ranks, `shards_of` says what each holds of a model. Tensors between ranks go through a `Comm`
(`parallel/comm.py`, which needs torch, as near.py and thread_comm.py do). Knows nothing of schedulers, KV or models.
"""

from serinus.parallel.mesh import Mesh, Shard, shards_of, share

__all__ = ["Mesh", "Shard", "shards_of", "share"]
