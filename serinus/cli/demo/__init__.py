"""`serinus demo` and the model that it serves (model/).

run      the command: three canaries, one fault
group    `serinus up` as a child
chats    the chats that the model knows; scripts/train_demo_model.py trains on them
"""

from serinus.cli.demo.run import run

__all__ = ["run"]
