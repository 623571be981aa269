"""Health checks: pure functions from facts of nodes to findings.

    facts (agent.facts.collect, one per node)  +  Context (the `health` section of the cluster file)
        -> judge.judge_node, judge.judge_cluster  ->  Finding...  ->  judge.verdict

Nothing here does I/O or reads a clock.
"""
