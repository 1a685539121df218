// Python's configuration on arm64 macOS, as far as its headers read it. Takes
// the place of the building machine's own pyconfig.h (see build.py).
#pragma once

#define SIZEOF_SHORT 2
#define SIZEOF_INT 4
#define SIZEOF_LONG 8
#define SIZEOF_LONG_LONG 8
#define SIZEOF_VOID_P 8
#define SIZEOF_SIZE_T 8
#define SIZEOF_PID_T 4
#define SIZEOF_TIME_T 8
#define SIZEOF_WCHAR_T 4
#define SIZEOF_FLOAT 4
#define SIZEOF_DOUBLE 8
#define ALIGNOF_LONG 8
#define ALIGNOF_SIZE_T 8
#define ALIGNOF_MAX_ALIGN_T 8

#define STDC_HEADERS 1
#define HAVE_ERRNO_H 1
#define HAVE_STDARG_PROTOTYPES 1
#define HAVE_STDINT_H 1
#define HAVE_INTTYPES_H 1
#define HAVE_SYS_TYPES_H 1
#define HAVE_SYS_STAT_H 1
#define HAVE_SYS_TIME_H 1
#define HAVE_SYS_SELECT_H 1
#define HAVE_UNISTD_H 1
#define HAVE_PTHREAD_H 1
#define HAVE_STD_ATOMIC 1
#define HAVE_BUILTIN_ATOMIC 1
#define HAVE_LONG_LONG 1
#define HAVE_DYNAMIC_LOADING 1
#define HAVE_CLOCK_GETTIME 1
#define HAVE_WCHAR_H 1

#define DOUBLE_IS_LITTLE_ENDIAN_IEEE754 1
#define WITH_DECIMAL_CONTEXTVAR 1
#define WITH_DOC_STRINGS 1
#define WITH_FREELISTS 1
#define WITH_PYMALLOC 1
#define PY_SUPPORT_TIER 1
