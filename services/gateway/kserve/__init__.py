"""The KServe face: the open inference protocol v2 over gRPC, and the stream that Triton added to it.

`tensors` reads and writes tensors of one element, `sampling` the parameters, `translate` makes requests of the mesh of
them and answers back, `service` is the servicer.
"""
