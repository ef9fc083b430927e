"""Real NIXL and Mooncake between real processes: `make extras`. Not collected otherwise: they are optional."""
