"""The verbs, a module each: options, help with examples, and one call."""
