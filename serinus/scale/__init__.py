"""How many engines of each role there should be, from what was seen of them."""

from serinus.scale.planner import Bounds, Decision, Memory, RoleSeen, ScalePace, Seen, plan

__all__ = ["Bounds", "Decision", "Memory", "RoleSeen", "ScalePace", "Seen", "plan"]
