"""What each look at a machine finds: the `data` of a group of facts. `clusterctl.agent.facts` tells what it means."""
