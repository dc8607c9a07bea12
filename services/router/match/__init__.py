"""Whether two questions that embed alike may share an answer."""
