"""What transports over sockets share: the listener, the door with its hellos, the writer's end of a link, helpers."""
