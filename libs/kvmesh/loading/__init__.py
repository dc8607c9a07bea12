"""Reading model files: GGUF, Hugging Face directories, tokenizers. Only `weights` touches torch."""
