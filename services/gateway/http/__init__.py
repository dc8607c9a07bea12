"""The HTTP face: OpenAI's API over the same front as gRPC. `server` owns sockets, `app` routes, the rest translates."""
