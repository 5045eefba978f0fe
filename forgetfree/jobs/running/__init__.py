"""How the units of a job are run, kept, resumed and shown, whatever the job is."""
