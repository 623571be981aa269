"""Deep checks: what nodes compute and transfer under load, and which node or link is bad. Pure."""
