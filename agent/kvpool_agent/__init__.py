"""The node agent: owns the arena, moves blocks between `ram` and `valkey`, tells the router what lies where."""
