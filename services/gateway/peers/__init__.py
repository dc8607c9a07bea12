"""Abort over all processes and replicas of the gateway.

`directory` knows where the others are: Unix sockets of one instance's processes, addresses of replicas in Redis.
`abort` asks them: the owner by the id's prefix, everybody for an id that a client chose. `service` is what they ask.
"""
