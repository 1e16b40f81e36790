"""`spottrain checkpoints VERB URI`. Nothing here executes what it reads.

verbs   arguments, output, exit codes; every other module is one verb
"""
