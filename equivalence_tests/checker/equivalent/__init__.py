"""The equivalent: what somebody's attention computes, as a program of torch's parts with the user's own weights."""
