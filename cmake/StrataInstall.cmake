# Filled by the packaging of the C++ libraries.
