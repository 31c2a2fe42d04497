"""The eager reference, and inputs on which a wrong kernel shows."""
