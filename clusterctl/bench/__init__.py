"""How a job scales: which runs to make, and what their numbers say."""
