"""The `ref` column: every op in plain torch, on any device. It is the specification; speed is no aim here."""
