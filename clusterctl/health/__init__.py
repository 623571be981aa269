"""Pure judges over facts: what a node's own words mean, what the nodes say about each other, and what it adds up to.

    facts (agent.facts.collect, one a node)  +  Context (what the cluster file promises and tolerates)
        -> judge.judge_node, judge.judge_cluster  ->  Finding...  ->  judge.verdict

Nothing here does I/O or reads a clock.
"""
