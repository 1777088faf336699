"""This process and its children, as the operating system sees them: started, watched, ended, diagnosed."""
