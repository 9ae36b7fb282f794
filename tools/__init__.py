"""The workshop: pages and report, timings, simulation.  Nothing else imports it."""
