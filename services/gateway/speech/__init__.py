"""Between a chat's messages and a model's text: tools, reasoning, forms of answers. `shape` in, `reader` out."""
