"""Benchmarks and the timeline: what a step costs and where its time goes. Nothing else imports this."""
