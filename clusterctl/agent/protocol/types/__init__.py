"""The shapes of what travels as JSON, for the type checker alone: nobody imports these files at run time.

What arrives is checked at the head's door (`clusterctl.door`), field by field; these are its shapes by name. Keys that
an older agent does not send are not required.
"""
